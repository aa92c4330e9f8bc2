package tmc

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	tmcv1 "tmc/v1"
)

// queueReader receives from a queue of RabbitMQ, over one connection after the other.
type queueReader struct {
	receiver *receiver
	queue    string
	topic    string // one of those whose copies are in it
	screen   *screen
}

func (q *queueReader) run(ctx context.Context) {
	for pause := shortestPause; ctx.Err() == nil; pause = min(2*pause, longestPause) {
		got, err := q.read(ctx)
		if ctx.Err() != nil {
			return
		}
		q.receiver.client.log.Info("tmc: the connection to RabbitMQ ended", "queue", q.queue, "error", err)
		if got {
			pause = shortestPause
		}
		sleep(ctx, pause)
	}
}

// read receives over one connection. Returns: whether it began to, and why it ended.
func (q *queueReader) read(ctx context.Context) (got bool, err error) {
	connection, err := q.connect(ctx)
	if err != nil {
		return false, err
	}
	defer connection.Close()
	channel, err := connection.Channel()
	if err != nil {
		return false, err
	}
	if err := channel.Qos(q.receiver.consumer.Workers, 0, false); err != nil {
		return false, err
	}
	closed := channel.NotifyClose(make(chan *amqp.Error, 1))
	copies, err := channel.Consume(q.queue, "", false, false, false, false, nil)
	if err != nil {
		return false, err
	}
	all := sync.WaitGroup{}
	defer all.Wait() // what is handled is acked at the broker before the connection closes
	for {
		select {
		case d, open := <-copies:
			if !open {
				if why := <-closed; why != nil {
					err = why
				}
				return true, err
			}
			q.receiver.busy.Add(1)
			all.Go(func() {
				defer q.receiver.busy.Done()
				q.take(ctx, &d)
			})
		case <-ctx.Done():
			return true, ctx.Err()
		}
	}
}

// connect tries the nodes in turn.
func (q *queueReader) connect(ctx context.Context) (*amqp.Connection, error) {
	plan, err := q.receiver.describe(ctx)
	if err != nil {
		return nil, err
	}
	broker, consumer := plan.Broker, q.receiver.consumer
	if broker == nil {
		return nil, fmt.Errorf("tmc: the center does not say where its broker is")
	}
	q.screen.learn(plan)
	user, password := consumer.BrokerUser, consumer.BrokerPassword
	if user == "" {
		user, password = "guest", "guest"
	}
	config := amqp.Config{
		SASL: []amqp.Authentication{&amqp.PlainAuth{Username: user, Password: password}}, Vhost: broker.VirtualHost,
		Heartbeat: 10 * time.Second, Locale: "en_US", Properties: amqp.NewConnectionProperties(),
		Dial: amqp.DefaultDial(5 * time.Second),
	}
	config.Properties.SetClientConnectionName("tmc " + q.queue)
	scheme := "amqp://"
	if broker.Tls {
		scheme, config.TLSClientConfig = "amqps://", consumer.BrokerTLS
	}
	for _, address := range append([]string{net.JoinHostPort(broker.Host, strconv.Itoa(int(broker.Port)))}, broker.Others...) {
		var connection *amqp.Connection
		if connection, err = amqp.DialConfig(scheme+address, config); err == nil {
			return connection, nil
		}
	}
	return nil, err
}

// take has a copy handled. It is acked at the broker whatever became of it: the center decides when it comes again.
func (q *queueReader) take(ctx context.Context, d *amqp.Delivery) {
	arrived := time.Now()
	m, signature := copyOf(d)
	switch q.screen.judge(ctx, m, signature, q) {
	case genuine:
		m.Redelivered = m.Redelivered || time.Since(arrived) > askEvery // the broker may have given it to somebody else meanwhile
		q.receiver.handle(m)
	case stopped:
		return // it comes again
	}
	if q.receiver.ctx.Err() == nil {
		_ = d.Ack(false) // what cannot be acked comes again, and its handler does not begin
	}
}

// copyOf reads a copy. What is missing in a forged one is empty, and so not what the center signed.
func copyOf(d *amqp.Delivery) (*Copy, string) {
	m := &Copy{
		MessageID: d.MessageId, Topic: d.Type, Producer: d.AppId, Body: d.Body, ContentType: d.ContentType,
		Headers: map[string]string{}, Redelivered: d.Redelivered,
	}
	signature := ""
	for name, value := range d.Headers {
		text, lower := fmt.Sprint(value), strings.ToLower(name)
		switch {
		case name == "tmc-key":
			m.Key = text
		case name == "tmc-subscriber":
			m.Subscriber = text
		case name == "tmc-signature":
			signature = text
		case name == "tmc-attempt":
			number, _ := strconv.ParseInt(text, 10, 32)
			m.Attempt = int32(number)
		case name == "tmc-interval-ms":
			number, _ := strconv.ParseInt(text, 10, 48)
			m.Interval = time.Duration(number) * time.Millisecond
		case strings.HasPrefix(name, "tmc-user-"):
			m.Headers[strings.TrimPrefix(name, "tmc-user-")] = text
		case !strings.HasPrefix(lower, "x-") && lower != "cc" && lower != "bcc":
			m.Headers[name] = text
		}
	}
	return m, signature
}

// signedBy returns the signature that a key gives a copy: docs/signatures.md.
func signedBy(key []byte, m *Copy) string {
	digest, id, mac := sha256.Sum256(m.Body), sha256.Sum256(key), hmac.New(sha256.New, key)
	parts := []string{
		m.Topic, m.Producer, m.Subscriber, strconv.FormatInt(m.Interval.Milliseconds(), 10), m.ContentType, m.MessageID,
		strconv.Itoa(int(m.Attempt)), m.Key, string(digest[:]),
	}
	names := make([]string, 0, len(m.Headers))
	for name := range m.Headers {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		parts = append(parts, name, m.Headers[name])
	}
	for _, part := range parts {
		fmt.Fprintf(mac, "%d:%s,", len(part), part)
	}
	return "v1=" + hex.EncodeToString(id[:4]) + ":" + hex.EncodeToString(mac.Sum(nil))
}

type judgment int

const (
	genuine judgment = iota
	forged
	stopped // before it was known
)

const (
	askEvery    = 500 * time.Millisecond
	reportEvery = time.Second
)

// screen lets only copies pass that the center signed, and reports the others.
type screen struct {
	receiver *receiver

	lock     sync.Mutex
	keys     map[string][][]byte // by topic; none: its copies are not signed
	asked    time.Time
	forged   map[string]*tmcv1.ReportForgedCopiesRequest // by topic, not reported yet
	reported bool                                        // somebody is about to
}

func newScreen(r *receiver) *screen {
	return &screen{receiver: r, forged: map[string]*tmcv1.ReportForgedCopiesRequest{}}
}

func (s *screen) learn(plan *tmcv1.DescribeSubscriptionsResponse) {
	keys := map[string][][]byte{}
	for _, subscription := range plan.Subscriptions {
		keys[subscription.Topic] = [][]byte{}
		for _, text := range subscription.DeliveryKeys {
			if key, err := hex.DecodeString(text); err == nil {
				keys[subscription.Topic] = append(keys[subscription.Topic], key)
			}
		}
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	s.keys, s.asked = keys, time.Now()
}

// judge waits for the center's answer if a copy names a key or a topic that is not known yet.
func (s *screen) judge(ctx context.Context, m *Copy, signature string, q *queueReader) judgment {
	right, known := s.isGenuine(m, signature)
	for !known && !right {
		asked := s.lastAsked()
		if !sleep(ctx, time.Until(asked.Add(askEvery))) {
			return stopped
		}
		if s.isMine(asked) { // one asks for all that wait
			plan, err := s.receiver.describe(ctx)
			if err != nil {
				return stopped
			}
			s.learn(plan)
		}
		right, known = s.isGenuine(m, signature)
		if s.lastAsked().After(asked) {
			break
		}
	}
	if right {
		return genuine
	}
	s.report(m, q.topic)
	return forged
}

// isGenuine returns whether the center signed a copy, and whether that is certain with the keys that are known.
func (s *screen) isGenuine(m *Copy, signature string) (right, known bool) {
	s.lock.Lock()
	defer s.lock.Unlock()
	keys, found := s.keys[m.Topic]
	if found && len(keys) == 0 {
		return true, true
	}
	for _, key := range keys {
		want := signedBy(key, m)
		if hmac.Equal([]byte(want), []byte(signature)) {
			return true, true
		}
		if id, _, _ := strings.Cut(want, ":"); strings.HasPrefix(signature, id+":") {
			return false, true
		}
	}
	return false, found && signature == ""
}

func (s *screen) lastAsked() time.Time {
	s.lock.Lock()
	defer s.lock.Unlock()
	return s.asked
}

// isMine returns whether the caller is the one that asks again.
func (s *screen) isMine(asked time.Time) bool {
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.asked != asked {
		return false
	}
	s.asked = time.Now()
	return true
}

// report tells the center of refused copies, once a second.
func (s *screen) report(m *Copy, topic string) {
	s.lock.Lock()
	defer s.lock.Unlock()
	if _, found := s.keys[m.Topic]; found {
		topic = m.Topic
	}
	if s.forged[topic] == nil {
		s.forged[topic] = &tmcv1.ReportForgedCopiesRequest{Topic: topic, MessageId: m.MessageID[:min(len(m.MessageID), 100)]}
	}
	s.forged[topic].Count++
	if !s.reported {
		s.reported = true
		time.AfterFunc(reportEvery, s.send)
	}
}

func (s *screen) send() {
	s.lock.Lock()
	reports := s.forged
	s.forged, s.reported = map[string]*tmcv1.ReportForgedCopiesRequest{}, false
	s.lock.Unlock()
	for _, report := range reports {
		s.receiver.client.log.Error("tmc: copies that the center did not sign are dropped", "topic", report.Topic, "count", report.Count)
		ctx, cancel := context.WithTimeout(s.receiver.ctx, callTimeout)
		if _, err := s.receiver.client.consumed.ReportForgedCopies(ctx, report); err != nil {
			s.receiver.client.log.Warn("tmc: they could not be reported", "error", err)
		}
		cancel()
	}
}
